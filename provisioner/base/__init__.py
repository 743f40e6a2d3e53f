"""What all others build on: errors, records, text, strict readers, settings, signals, progress and the clock."""
