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
  description = "Zones that get a subnet in each VPC, each with the number of its addresses: at least two, in case one lacks capacity."
  type        = map(number)
  nullable    = false

  validation {
    condition     = length(var.availability_zones) >= 2 && length(distinct(values(var.availability_zones))) == length(var.availability_zones)
    error_message = "availability_zones must name at least two zones, each with a number of its own."
  }

  validation {
    # The upper half of the offline VPC is for environments with an allowlist.
    condition     = alltrue([for index in values(var.availability_zones) : index >= 0 && index < 8 && floor(index) == index])
    error_message = "The number of a zone must be from 0 to 7."
  }
}

variable "controllers" {
  description = "IPv4 networks from which controllers reach machines by SSH, the only networks that the offline VPC has routes to, each with the number of its rules in the network ACL."
  type        = map(number)
  nullable    = false

  validation {
    condition     = length(var.controllers) > 0 && alltrue([for cidr in keys(var.controllers) : can(cidrhost(cidr, 0)) && !strcontains(cidr, ":")])
    error_message = "controllers must name at least one IPv4 network in CIDR form."
  }

  validation {
    condition     = alltrue([for cidr in keys(var.controllers) : tonumber(split("/", cidr)[1]) >= 8])
    error_message = "A controller's network must be a /8 or smaller: offline means no public egress."
  }

  validation {
    condition     = length(distinct(values(var.controllers))) == length(var.controllers) && alltrue([for number in values(var.controllers) : number >= 100 && number <= 32766 && floor(number) == number])
    error_message = "Each controller needs a number of its own, from 100 to 32766."
  }
}

variable "seen" {
  description = "When each controller was last seen, by its network: tags of the offline VPC's route table."
  type        = map(string)
  default     = {}
  nullable    = false
}

variable "tags" {
  description = "Tags of all resources of this network, by which it is found."
  type        = map(string)
  default     = {}
  nullable    = false
}
