"""The aws cloud: EC2 machines in a network of their own, one per region.

cloud.py is the Cloud; the other modules are what it stands on, each with one concern. Decisions are pure and take
plain data (instance_types.py, placement.py, user_data.py, policy.py); what asks AWS says so.
"""
