mock_provider "aws" {
  mock_resource "aws_instance" {
    defaults = {
      public_ip  = "192.0.2.10"
      private_ip = "10.215.0.10"
      # Computed, so a mock would invent one; a profile that the module sets still shows.
      iam_instance_profile = ""
    }
  }
}

variables {
  environment_id   = "family-task-bcdfgh"
  full_internet    = false
  vpc_id           = "vpc-offline"
  subnet_id        = "subnet-offline"
  controller_cidrs = ["203.0.113.10/32"]
  instance_types   = { primary = "t3.small", aux = "t3.medium" }
  user_data        = { primary = "#cloud-config\n{}\n", aux = "#cloud-config\n{}\n" }
  tags             = { "provisioner:owner" = "tests", "provisioner:stack" = "family-task-bcdfgh" }
  expires_at       = "2026-01-31T23:59:59"

  scheduler_role_arn = "arn:aws:iam::123456789012:role/provisioner-scheduler"

  machines = {
    primary = { image = "ami-1", cpus = 2, memory_gib = 2, disk_gib = 16, public_key = "ssh-ed25519 AAAA" }
    aux     = { image = "ami-2", cpus = 2, memory_gib = 4, disk_gib = 20, public_key = "ssh-ed25519 AAAA" }
  }
}

run "offline" {
  command = apply

  assert {
    condition     = length(aws_vpc_security_group_egress_rule.internet) + length(aws_vpc_security_group_egress_rule.allowed) == 0
    error_message = "An offline environment has no way out."
  }
  assert {
    condition     = aws_vpc_security_group_egress_rule.neighbours.referenced_security_group_id == aws_security_group.this.id
    error_message = "What it may send to is itself."
  }
  assert {
    condition     = length(aws_subnet.allowlist) + length(aws_route.allowlist) == 0
    error_message = "Without an allowlist it lives in the shared subnet."
  }
  assert {
    condition     = aws_instance.this["primary"].associate_public_ip_address && !aws_instance.this["aux"].associate_public_ip_address
    error_message = "An offline aux VM has no public address."
  }
  assert {
    condition     = output.machines["aux"].jump == "primary" && output.machines["aux"].host == "10.215.0.10" && output.machines["primary"].jump == null
    error_message = "The aux VM is reached through the primary machine."
  }
  assert {
    condition = alltrue([
      for machine in aws_instance.this :
      machine.metadata_options[0].http_tokens == "required" && machine.metadata_options[0].http_put_response_hop_limit == 1 &&
      machine.iam_instance_profile == "" && machine.instance_initiated_shutdown_behavior == "terminate" &&
      machine.root_block_device[0].encrypted && machine.root_block_device[0].volume_type == "gp3" &&
      machine.root_block_device[0].delete_on_termination
    ])
    error_message = "Metadata by token only, no rights, no remains."
  }
  assert {
    condition = toset(keys(aws_scheduler_schedule.limit)) == toset(["primary", "aux"]) && alltrue([
      for role, schedule in aws_scheduler_schedule.limit :
      schedule.name == "family-task-bcdfgh.${role}" &&
      schedule.schedule_expression == "at(2026-01-31T23:59:59)" &&
      schedule.schedule_expression_timezone == "UTC" &&
      schedule.target[0].arn == "arn:aws:scheduler:::aws-sdk:ec2:terminateInstances" &&
      schedule.target[0].role_arn == var.scheduler_role_arn &&
      jsondecode(schedule.target[0].input) == { InstanceIds = [aws_instance.this[role].id], SkipOsShutdown = true }
    ])
    error_message = "Each machine has a schedule that ends it at the limit, and nothing else."
  }
  assert {
    condition = aws_instance.this["aux"].root_block_device[0].volume_size == 20 && alltrue([
      for tags in [aws_instance.this["aux"].tags, aws_instance.this["aux"].volume_tags, aws_security_group.this.tags] :
      tags["provisioner:environment"] == "family-task-bcdfgh" && tags["provisioner:owner"] == "tests"
    ])
    error_message = "All that it is made of carries the tags."
  }
}

run "online" {
  command = apply

  variables {
    full_internet = true
    spot          = true
  }

  assert {
    condition     = aws_vpc_security_group_egress_rule.internet[0].cidr_ipv4 == "0.0.0.0/0" && aws_vpc_security_group_egress_rule.internet[0].ip_protocol == "-1"
    error_message = "With full_internet everything may go out."
  }
  assert {
    condition     = toset(keys(aws_vpc_security_group_ingress_rule.controller)) == toset(["203.0.113.10/32"]) && aws_vpc_security_group_ingress_rule.controller["203.0.113.10/32"].from_port == 22
    error_message = "From outside, the controller's SSH alone comes in."
  }
  assert {
    condition     = alltrue([for machine in aws_instance.this : machine.instance_market_options[0].market_type == "spot"])
    error_message = "Spot is asked for with the instance, which keeps its tags."
  }
  assert {
    condition     = alltrue([for machine in output.machines : machine.jump == null && machine.host == "192.0.2.10"])
    error_message = "Machines with internet are reached directly."
  }
}

run "allowlist" {
  command = apply

  variables {
    allowed_destinations = [{ cidr = "198.51.100.7/32", port = 443 }]
    allowlist            = { cidr = "10.215.128.16/28", zone = "eu-west-1a", gateway_id = "igw-offline" }
  }

  assert {
    condition     = toset(keys(aws_route.allowlist)) == toset(["198.51.100.7/32", "203.0.113.10/32"])
    error_message = "Routes lead to the destination and the controller, and nowhere else."
  }
  assert {
    condition = toset([for rule in aws_network_acl.allowlist[0].egress : "${rule.cidr_block}:${rule.from_port}-${rule.to_port}"]) == toset([
      "198.51.100.7/32:443-443", "203.0.113.10/32:1024-65535",
    ])
    error_message = "The network ACL lets the destination's port and answers to the controller out."
  }
  assert {
    condition     = aws_vpc_security_group_egress_rule.allowed["198.51.100.7/32:443"].ip_protocol == "tcp"
    error_message = "The security group lets the destination's port out."
  }
}

run "a_controller_that_joins_renumbers_no_rule" {
  command = apply

  variables {
    allowed_destinations = [{ cidr = "198.51.100.7/32", port = 443 }]
    allowlist            = { cidr = "10.215.128.16/28", zone = "eu-west-1a", gateway_id = "igw-offline" }
    controller_cidrs     = ["192.0.2.1/32", "203.0.113.10/32"]
    controller_rules     = { "203.0.113.10/32" = 100, "192.0.2.1/32" = 101 }
  }

  assert {
    condition = toset([for rule in aws_network_acl.allowlist[0].egress : "${rule.rule_no} ${rule.cidr_block}"]) == toset([
      "100 203.0.113.10/32", "101 192.0.2.1/32", "200 198.51.100.7/32",
    ])
    error_message = "Rules have the numbers that the shared network gave them."
  }
  assert {
    condition = toset([for rule in aws_network_acl.allowlist[0].ingress : "${rule.rule_no} ${rule.cidr_block}"]) == toset([
      "100 203.0.113.10/32", "101 192.0.2.1/32", "200 198.51.100.7/32",
    ])
    error_message = "In both directions."
  }
}

run "every_controller_has_a_rule" {
  command = plan

  variables {
    controller_rules = { "192.0.2.1/32" = 101 }
  }

  expect_failures = [var.controller_rules]
}

run "a_rule_is_not_among_those_of_destinations" {
  command = plan

  variables {
    controller_rules = { "203.0.113.10/32" = 200 }
  }

  expect_failures = [var.controller_rules]
}

run "a_limit_is_a_time" {
  command = plan

  variables {
    expires_at = "4h"
  }

  expect_failures = [var.expires_at]
}

run "the_whole_internet_is_no_destination" {
  command = plan

  variables {
    allowed_destinations = [{ cidr = "0.0.0.0/0", port = 443 }]
    allowlist            = { cidr = "10.215.128.16/28", zone = "eu-west-1a", gateway_id = "igw-offline" }
  }

  expect_failures = [var.allowed_destinations]
}

run "full_internet_takes_no_allowlist" {
  command = plan

  variables {
    full_internet        = true
    allowed_destinations = [{ cidr = "198.51.100.7/32", port = 443 }]
    allowlist            = { cidr = "10.215.128.16/28", zone = "eu-west-1a", gateway_id = "igw-offline" }
  }

  expect_failures = [var.allowed_destinations]
}

run "destinations_need_a_subnet" {
  command = plan

  variables {
    allowed_destinations = [{ cidr = "198.51.100.7/32", port = 443 }]
  }

  expect_failures = [var.allowlist]
}

run "a_change_of_user_data_stops_no_machine" {
  command = plan

  variables {
    user_data = { primary = "other", aux = "other" }
  }

  assert {
    condition     = alltrue([for machine in aws_instance.this : machine.user_data == "#cloud-config\n{}\n"])
    error_message = "User data counts at creation alone: versions of the provider write it into the state differently."
  }
}

run "everybody_is_no_controller" {
  command = plan

  variables {
    controller_cidrs = ["0.0.0.0/0"]
  }

  expect_failures = [var.controller_cidrs]
}

run "a_private_key_is_no_user_data" {
  command = plan

  variables {
    user_data = { primary = "-----BEGIN OPENSSH PRIVATE KEY-----" }
  }

  expect_failures = [var.user_data]
}

run "every_machine_has_a_type" {
  command = plan

  variables {
    instance_types = { primary = "t3.small" }
  }

  expect_failures = [var.instance_types]
}
