"""Attacks on the controller: by machines, by families, by other users of the host, by what lies in stores."""
