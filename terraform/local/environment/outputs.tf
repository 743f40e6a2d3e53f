output "machines" {
  description = "How the controller reaches each machine's sshd (host, port), and its address on the environment's own link (private_address, null without an aux VM), by role."
  value = {
    for role, machine in terraform_data.machine :
    # Read only after the machine has started; the file is missing if something else has destroyed the machine.
    role => try(jsondecode(file("${machine.output}/endpoint.json")), null)
  }
}
