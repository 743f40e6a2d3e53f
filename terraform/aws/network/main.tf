# One network per region, for all environments (AWS's default quota is five VPCs per region). Environments with and
# without internet are in different VPCs: the offline VPC has no route, no rule and no name server that leads out.

locals {
  vpcs = {
    online  = { cidr = "10.214.0.0/16", dns = true }
    offline = { cidr = "10.215.0.0/16", dns = false }
  }
  subnets = merge([
    for kind, vpc in local.vpcs : {
      for zone, index in var.availability_zones :
      "${kind}-${zone}" => { kind = kind, zone = zone, cidr = cidrsubnet(vpc.cidr, 4, index) }
    }
  ]...)
  tags = merge(var.tags, { "provisioner:network" = var.region })
}

resource "aws_vpc" "this" {
  #checkov:skip=CKV2_AWS_11:Flow logs cost money by the gigabyte. The VPC is permanent, so an operator may add them.
  #checkov:skip=CKV2_AWS_12:No machine ever uses it, and emptying it would need rights on resources without our tag.
  for_each = local.vpcs

  cidr_block = each.value.cidr
  # The resolver of a VPC answers whatever security groups say, and DNS carries data out.
  enable_dns_support   = each.value.dns
  enable_dns_hostnames = each.value.dns

  tags = merge(local.tags, { Name = "provisioner-${each.key}", "provisioner:network-kind" = each.key })
}

resource "aws_internet_gateway" "this" {
  for_each = aws_vpc.this

  vpc_id = each.value.id
  tags   = merge(local.tags, { Name = "provisioner-${each.key}" })
}

resource "aws_subnet" "this" {
  for_each = local.subnets

  vpc_id            = aws_vpc.this[each.value.kind].id
  availability_zone = each.value.zone
  cidr_block        = each.value.cidr
  # Each instance's own configuration decides whether it gets a public address.
  map_public_ip_on_launch = false

  tags = merge(local.tags, { Name = "provisioner-${each.key}", "provisioner:network-kind" = each.value.kind })
}

resource "aws_route_table" "this" {
  for_each = aws_vpc.this

  vpc_id = each.value.id
  tags = merge(
    local.tags,
    { Name = "provisioner-${each.key}" },
    each.key == "offline" ? { for cidr, moment in var.seen : "provisioner:seen:${cidr}" => moment } : {},
  )
}

resource "aws_route" "internet" {
  route_table_id         = aws_route_table.this["online"].id
  gateway_id             = aws_internet_gateway.this["online"].id
  destination_cidr_block = "0.0.0.0/0"
}

resource "aws_route" "controller" {
  for_each = var.controllers

  route_table_id         = aws_route_table.this["offline"].id
  gateway_id             = aws_internet_gateway.this["offline"].id
  destination_cidr_block = each.key
}

resource "aws_route_table_association" "this" {
  for_each = local.subnets

  route_table_id = aws_route_table.this[each.value.kind].id
  subnet_id      = aws_subnet.this[each.key].id
}

# The third layer of "offline": only packets between neighbours and the controllers' SSH. Each
# controller's rules keep their number, so that none loses packets while another comes or goes.
resource "aws_network_acl" "offline" {
  vpc_id     = aws_vpc.this["offline"].id
  subnet_ids = [for name, subnet in local.subnets : aws_subnet.this[name].id if subnet.kind == "offline"]
  tags       = merge(local.tags, { Name = "provisioner-offline" })

  ingress {
    rule_no    = 50
    action     = "allow"
    protocol   = "-1"
    cidr_block = local.vpcs.offline.cidr
    from_port  = 0
    to_port    = 0
  }

  egress {
    rule_no    = 50
    action     = "allow"
    protocol   = "-1"
    cidr_block = local.vpcs.offline.cidr
    from_port  = 0
    to_port    = 0
  }

  dynamic "ingress" {
    for_each = var.controllers
    content {
      rule_no    = ingress.value
      action     = "allow"
      protocol   = "tcp"
      cidr_block = ingress.key
      from_port  = 22
      to_port    = 22
    }
  }

  # Network ACLs are stateless: replies go to whatever port the controller's client chose.
  dynamic "egress" {
    for_each = var.controllers
    content {
      rule_no    = egress.value
      action     = "allow"
      protocol   = "tcp"
      cidr_block = egress.key
      from_port  = 1024
      to_port    = 65535
    }
  }
}
