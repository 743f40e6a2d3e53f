"""Ends and removes what exists of environments in EC2: by schedules, and by tag, whatever Terraform believes."""
