"""What a local machine may reach, and the proof of it: the egress proxy, its rules, captures, the view from outside."""
