variable "region" {
  description = "Region of this network; part of its resources' names and tags."
  type        = string
  nullable    = false

  validation {
    condition     = can(regex("^[a-z]{2}(-[a-z]+)+-[0-9]$", var.region))
    error_message = "region must be the name of an AWS region, such as eu-west-1."
  }
}

variable "availability_zones" {
  description = "Zones that get a subnet in each VPC: at least two, in case one lacks capacity."
  type        = list(string)
  nullable    = false

  validation {
    condition     = length(var.availability_zones) >= 2 && length(distinct(var.availability_zones)) == length(var.availability_zones)
    error_message = "availability_zones must name at least two zones, each once."
  }
}

variable "controller_cidrs" {
  description = "IPv4 networks from which controllers reach machines by SSH, the only networks that the offline VPC has routes to."
  type        = set(string)
  nullable    = false

  validation {
    condition     = length(var.controller_cidrs) > 0 && alltrue([for cidr in var.controller_cidrs : can(cidrhost(cidr, 0)) && !strcontains(cidr, ":")])
    error_message = "controller_cidrs must name at least one IPv4 network in CIDR form."
  }

  validation {
    condition     = alltrue([for cidr in var.controller_cidrs : tonumber(split("/", cidr)[1]) >= 8])
    error_message = "A controller's network must be a /8 or smaller: offline means no public egress."
  }
}

variable "tags" {
  description = "Tags of all resources of this network, by which it is found."
  type        = map(string)
  default     = {}
  nullable    = false
}
