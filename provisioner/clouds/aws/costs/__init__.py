"""What environments cost on EC2, estimated from price lists and the spot market."""
