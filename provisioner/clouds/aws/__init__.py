"""The aws cloud: EC2 machines in a network of their own, one per region.

cloud.py puts AwsCloud together from its parts; every other module has one concern. Decisions are pure and take plain
data (instances/instance_types.py, instances/places.py, instances/user_data.py, costs/estimate.py).
"""
