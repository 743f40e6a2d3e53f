# The machines of one environment and their network. Each environment has its own security group, and no group refers
# to another environment's.

locals {
  tags = merge(var.tags, { "provisioner:environment" = var.environment_id })
  # The controller moves it with the schedule.
  limit = { "provisioner:expires-at" = "${var.expires_at}Z" }
  # Without a way out, only the primary machine can be reached from outside; the aux VM is reached through it. The
  # internet gateway drops the packets of a machine without a public address, also to an allowed destination.
  public = { for role in keys(var.machines) : role => var.full_internet || var.allowlist != null || role == "primary" }
  # Only allowed destinations have a route: the offline VPC's shared table has routes to the controllers alone.
  ways_out  = var.allowlist == null ? toset([]) : toset(concat(tolist(var.controller_cidrs), var.allowed_destinations[*].cidr))
  subnet_id = var.allowlist == null ? var.subnet_id : aws_subnet.allowlist[0].id
  # A rule whose number changes is made anew, and until then it lets no host in.
  controllers = { for index, cidr in sort(tolist(var.controller_cidrs)) : cidr => lookup(var.controller_rules, cidr, 100 + index) }
  allowed     = { for destination in var.allowed_destinations : "${destination.cidr}:${destination.port}" => destination }
}

# An environment with an allowlist has its own subnet in the offline VPC, with a route to each destination and a
# network ACL that allows nothing else.
resource "aws_subnet" "allowlist" {
  count = var.allowlist == null ? 0 : 1

  vpc_id                  = var.vpc_id
  availability_zone       = var.allowlist.zone
  cidr_block              = var.allowlist.cidr
  map_public_ip_on_launch = false
  tags                    = merge(local.tags, { Name = var.environment_id })
}

resource "aws_route_table" "allowlist" {
  count = var.allowlist == null ? 0 : 1

  vpc_id = var.vpc_id
  tags   = merge(local.tags, { Name = var.environment_id })
}

resource "aws_route" "allowlist" {
  for_each = local.ways_out

  route_table_id         = aws_route_table.allowlist[0].id
  gateway_id             = var.allowlist.gateway_id
  destination_cidr_block = each.value
}

resource "aws_route_table_association" "allowlist" {
  count = var.allowlist == null ? 0 : 1

  route_table_id = aws_route_table.allowlist[0].id
  subnet_id      = aws_subnet.allowlist[0].id
}

resource "aws_network_acl" "allowlist" {
  count = var.allowlist == null ? 0 : 1

  vpc_id     = var.vpc_id
  subnet_ids = [aws_subnet.allowlist[0].id]
  tags       = merge(local.tags, { Name = var.environment_id })

  dynamic "ingress" {
    for_each = local.controllers
    content {
      rule_no    = ingress.value
      action     = "allow"
      protocol   = "tcp"
      cidr_block = ingress.key
      from_port  = 22
      to_port    = 22
    }
  }

  # Network ACLs are stateless: replies come in and go out on whatever port the client chose.
  dynamic "egress" {
    for_each = local.controllers
    content {
      rule_no    = egress.value
      action     = "allow"
      protocol   = "tcp"
      cidr_block = egress.key
      from_port  = 1024
      to_port    = 65535
    }
  }

  dynamic "egress" {
    for_each = { for index, name in sort(keys(local.allowed)) : name => 200 + index }
    content {
      rule_no    = egress.value
      action     = "allow"
      protocol   = "tcp"
      cidr_block = local.allowed[egress.key].cidr
      from_port  = local.allowed[egress.key].port
      to_port    = local.allowed[egress.key].port
    }
  }

  dynamic "ingress" {
    for_each = { for index, name in sort(keys(local.allowed)) : name => 200 + index }
    content {
      rule_no    = ingress.value
      action     = "allow"
      protocol   = "tcp"
      cidr_block = local.allowed[ingress.key].cidr
      from_port  = 1024
      to_port    = 65535
    }
  }
}

resource "aws_key_pair" "this" {
  for_each = var.machines

  key_name   = "${var.environment_id}-${each.key}"
  public_key = each.value.public_key
  tags       = merge(local.tags, { "provisioner:role" = each.key })
}

# Terraform removes the rule that AWS adds to each new group, which allows everything out.
resource "aws_security_group" "this" {
  name        = var.environment_id
  description = "provisioner environment ${var.environment_id}"
  vpc_id      = var.vpc_id
  tags        = merge(local.tags, { Name = var.environment_id })
}

resource "aws_vpc_security_group_ingress_rule" "neighbours" {
  #checkov:skip=CKV_AWS_23:It refers only to its own group, which needs no description.
  security_group_id            = aws_security_group.this.id
  referenced_security_group_id = aws_security_group.this.id
  ip_protocol                  = "-1"
  tags                         = local.tags
}

resource "aws_vpc_security_group_egress_rule" "neighbours" {
  #checkov:skip=CKV_AWS_23:It refers only to its own group, which needs no description.
  security_group_id            = aws_security_group.this.id
  referenced_security_group_id = aws_security_group.this.id
  ip_protocol                  = "-1"
  tags                         = local.tags
}

resource "aws_vpc_security_group_ingress_rule" "controller" {
  for_each = var.controller_cidrs

  description       = "SSH from the controller."
  security_group_id = aws_security_group.this.id
  cidr_ipv4         = each.value
  ip_protocol       = "tcp"
  from_port         = 22
  to_port           = 22
  tags              = local.tags
}

resource "aws_vpc_security_group_egress_rule" "internet" {
  count = var.full_internet ? 1 : 0

  description       = "full_internet"
  security_group_id = aws_security_group.this.id
  cidr_ipv4         = "0.0.0.0/0"
  ip_protocol       = "-1"
  tags              = local.tags
}

resource "aws_vpc_security_group_egress_rule" "allowed" {
  for_each = local.allowed

  description       = "A destination of the allowlist."
  security_group_id = aws_security_group.this.id
  cidr_ipv4         = each.value.cidr
  ip_protocol       = "tcp"
  from_port         = each.value.port
  to_port           = each.value.port
  tags              = local.tags
}

resource "aws_instance" "this" {
  #checkov:skip=CKV_AWS_135:Only instance types with Nitro are chosen, and these are always EBS-optimized.
  #checkov:skip=CKV_AWS_126:Metrics by the minute cost money and are useless for a short-lived machine.
  #checkov:skip=CKV2_AWS_41:On purpose: a role would give the agent rights in the account.
  for_each = var.machines

  ami                         = each.value.image
  instance_type               = var.instance_types[each.key]
  subnet_id                   = local.subnet_id
  vpc_security_group_ids      = [aws_security_group.this.id]
  key_name                    = aws_key_pair.this[each.key].key_name
  associate_public_ip_address = local.public[each.key]
  user_data                   = lookup(var.user_data, each.key, null)

  instance_initiated_shutdown_behavior = "terminate"

  # No instance profile: a machine has no credentials to give away. Tokens do not pass a second hop, such as a
  # container's; once cloud-init is done, the controller switches the whole service off.
  metadata_options {
    http_endpoint               = "enabled"
    http_tokens                 = "required"
    http_put_response_hop_limit = 1
    instance_metadata_tags      = "disabled"
  }

  root_block_device {
    volume_type           = "gp3"
    volume_size           = each.value.disk_gib
    encrypted             = true
    delete_on_termination = true
  }

  # Not by the block device's own tags, which AWS sets by another call after the volume exists.
  volume_tags = merge(local.tags, local.limit, { Name = "${var.environment_id}-${each.key}", "provisioner:role" = each.key })

  # aws_spot_instance_request would leave the instance without tags, so that no sweep would find it.
  dynamic "instance_market_options" {
    for_each = var.spot ? [1] : []
    content {
      market_type = "spot"
      spot_options {
        instance_interruption_behavior = "terminate"
        spot_instance_type             = "one-time"
      }
    }
  }

  tags = merge(local.tags, local.limit, { Name = "${var.environment_id}-${each.key}", "provisioner:role" = each.key })

  # Machines with GPUs take long to end.
  timeouts {
    delete = "30m"
  }

  lifecycle {
    # Not drift: the controller switches the service off after boot. Versions 5 and 6 of the provider write user data
    # into the state in different forms, and a change of it would stop the machine.
    ignore_changes = [metadata_options[0].http_endpoint, user_data]
  }

  # Rules first, so that no machine runs before they are in force.
  depends_on = [
    aws_route.allowlist,
    aws_route_table_association.allowlist,
    aws_network_acl.allowlist,
    aws_vpc_security_group_ingress_rule.neighbours,
    aws_vpc_security_group_egress_rule.neighbours,
    aws_vpc_security_group_ingress_rule.controller,
    aws_vpc_security_group_egress_rule.internet,
    aws_vpc_security_group_egress_rule.allowed,
  ]
}

# The end of the time to live. It needs no controller, and root in a machine cannot cancel it. Each machine has its own:
# TerminateInstances ends all that it names or none, and EC2 no longer knows the id of one that ended an hour ago (EC2
# API reference, "TerminateInstances"). They come after all instances.
resource "aws_scheduler_schedule" "limit" {
  #checkov:skip=CKV_AWS_297:It contains only instance ids and a time, which EC2 shows to the same readers.
  for_each = var.machines

  name        = "${var.environment_id}.${each.key}"
  group_name  = "provisioner"
  description = "Time to live of the ${each.key} machine of the provisioner environment ${var.environment_id}"

  schedule_expression          = "at(${var.expires_at})"
  schedule_expression_timezone = "UTC"

  flexible_time_window {
    mode = "OFF"
  }

  target {
    arn      = "arn:aws:scheduler:::aws-sdk:ec2:terminateInstances"
    role_arn = var.scheduler_role_arn
    input    = jsonencode({ InstanceIds = [aws_instance.this[each.key].id], SkipOsShutdown = true })
  }
}
