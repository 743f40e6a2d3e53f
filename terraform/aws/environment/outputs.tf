output "machines" {
  description = "How the controller reaches each machine's sshd (host, port), the role of the machine that it must go through (jump, null for a direct connection), its address on the environment's network (private_address, null without an aux VM) and its instance id, by role."
  value = {
    for role, instance in aws_instance.this : role => {
      host            = local.public[role] ? instance.public_ip : instance.private_ip
      port            = 22
      jump            = local.public[role] ? null : "primary"
      private_address = length(var.machines) > 1 ? instance.private_ip : null
      instance_id     = instance.id
    }
  }
}
