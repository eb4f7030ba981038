"""All algorithms on K logical ranks against serial SGD."""
