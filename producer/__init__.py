"""The producer: from a file of requests to a file of rows."""
