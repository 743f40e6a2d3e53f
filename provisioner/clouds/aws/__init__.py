"""The aws cloud: EC2 machines in a network of their own, one per region. cloud.py puts AwsCloud together."""
