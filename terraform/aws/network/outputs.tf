output "vpcs" {
  description = "Id of each VPC, by kind (online, offline)."
  value       = { for kind, vpc in aws_vpc.this : kind => vpc.id }
}

output "subnets" {
  description = "Id of each subnet, by kind and availability zone."
  value = {
    for kind in keys(local.vpcs) : kind => {
      for name, subnet in local.subnets : subnet.zone => aws_subnet.this[name].id if subnet.kind == kind
    }
  }
}

output "gateways" {
  description = "Id of each VPC's internet gateway, by kind."
  value       = { for kind, gateway in aws_internet_gateway.this : kind => gateway.id }
}
