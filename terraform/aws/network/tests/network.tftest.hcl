mock_provider "aws" {}

variables {
  region             = "eu-west-1"
  availability_zones = { eu-west-1a = 0, eu-west-1b = 1 }
  controllers        = { "203.0.113.10/32" = 100, "198.51.100.0/24" = 101 }
  seen               = { "203.0.113.10/32" = "2026-01-02T03:04:05Z" }
  tags               = { "provisioner:network" = "eu-west-1", "provisioner:owner" = "tests" }
}

run "network" {
  command = apply

  assert {
    condition     = !aws_vpc.this["offline"].enable_dns_support && !aws_vpc.this["offline"].enable_dns_hostnames && aws_vpc.this["online"].enable_dns_support
    error_message = "The offline VPC has no resolver."
  }
  assert {
    condition     = toset([for route in aws_route.controller : route.destination_cidr_block]) == toset(["203.0.113.10/32", "198.51.100.0/24"])
    error_message = "The offline VPC has routes to the controllers, and no others."
  }
  assert {
    condition     = aws_route_table.this["offline"].tags["provisioner:seen:203.0.113.10/32"] == "2026-01-02T03:04:05Z" && !contains(keys(aws_route_table.this["online"].tags), "provisioner:seen:203.0.113.10/32")
    error_message = "The offline VPC's route table says when a controller was last seen."
  }
  assert {
    condition     = aws_route.internet.destination_cidr_block == "0.0.0.0/0" && aws_route.internet.route_table_id == aws_route_table.this["online"].id
    error_message = "The default route is the online VPC's."
  }
  assert {
    condition = toset([for rule in aws_network_acl.offline.egress : "${rule.cidr_block} ${rule.protocol} ${rule.from_port}"]) == toset([
      "10.215.0.0/16 -1 0", "198.51.100.0/24 tcp 1024", "203.0.113.10/32 tcp 1024",
    ])
    error_message = "The offline VPC's network ACL lets out to neighbours, and answers to controllers, and nothing else."
  }
  assert {
    condition = toset([for rule in aws_network_acl.offline.ingress : "${rule.cidr_block} ${rule.protocol} ${rule.to_port}"]) == toset([
      "10.215.0.0/16 -1 0", "198.51.100.0/24 tcp 22", "203.0.113.10/32 tcp 22",
    ])
    error_message = "From outside, SSH alone comes in."
  }
  assert {
    condition     = length(output.subnets["online"]) == 2 && length(output.subnets["offline"]) == 2
    error_message = "Each VPC has a subnet in each zone."
  }
  assert {
    condition     = alltrue([for subnet in aws_subnet.this : !subnet.map_public_ip_on_launch])
    error_message = "No machine gets a public address unasked."
  }
  assert {
    condition     = alltrue([for vpc in aws_vpc.this : vpc.tags["provisioner:network"] == "eu-west-1"])
    error_message = "It is found again by its tag."
  }
}

run "one_zone_is_not_enough" {
  command = plan

  variables {
    availability_zones = { eu-west-1a = 0 }
  }

  expect_failures = [var.availability_zones]
}

run "a_controller_has_a_network" {
  command = plan

  variables {
    controllers = {}
  }

  expect_failures = [var.controllers]
}

run "half_the_internet_is_no_controller" {
  command = plan

  variables {
    controllers = { "128.0.0.0/1" = 100 }
  }

  expect_failures = [var.controllers]
}

run "two_controllers_share_no_number" {
  command = plan

  variables {
    controllers = { "203.0.113.10/32" = 100, "198.51.100.0/24" = 100 }
  }

  expect_failures = [var.controllers]
}
