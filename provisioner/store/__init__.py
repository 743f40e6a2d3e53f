"""What lies on disk: the home directory, records of environments and images, leases.

Knows what the files hold and how they are written safely. Creates nothing in any cloud.
"""
