"""What breaks: damage to bytes on disk; every kind is one entry in a table, none a special case."""
