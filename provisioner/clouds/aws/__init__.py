"""The aws cloud: EC2 machines in a network of their own, one per region.

cloud.py puts AwsCloud together from its parts (account, sizing, images, placement, stacks, machines, clean_up); every
other module has one concern. Decisions are pure and take plain data (instance_types, costs, places, user_data).
"""
