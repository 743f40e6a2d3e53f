terraform {
  required_version = ">= 1.9"

  required_providers {
    aws = {
      source = "hashicorp/aws"
      # Versions before 6.5 would replace resources that 5 has made: see terraform-provider-aws, pull request 43516.
      version = ">= 5.100, != 6.0.0, != 6.1.0, != 6.2.0, != 6.3.0, != 6.4.0, < 7"
    }
  }
}
