# Two resources per machine. When a create-time provisioner fails, Terraform taints the resource and never runs its
# destroy-time provisioner. So `directory`, which cannot fail half-way, owns the destruction, and `machine`, which
# can, only starts QEMU. Values are passed in the environment and are never part of a command.

locals {
  settings = {
    for role, machine in var.machines : role => jsonencode(merge(machine, {
      full_internet        = var.full_internet
      allowed_destinations = var.allowed_destinations
    }))
  }
}

resource "terraform_data" "directory" {
  for_each = var.machines

  input = "${var.directory}/${each.key}"

  provisioner "local-exec" {
    when    = destroy
    command = "exec \"$PROVISIONER_PYTHON\" -m provisioner.clouds.local.machine destroy"
    environment = {
      PROVISIONER_MACHINE_DIRECTORY = self.input
    }
  }
}

resource "terraform_data" "machine" {
  for_each = var.machines

  input = terraform_data.directory[each.key].output

  provisioner "local-exec" {
    command = "exec \"$PROVISIONER_PYTHON\" -m provisioner.clouds.local.machine start"
    environment = {
      PROVISIONER_MACHINE           = local.settings[each.key]
      PROVISIONER_MACHINE_DIRECTORY = self.input
    }
  }
}
