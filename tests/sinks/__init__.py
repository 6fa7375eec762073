"""What the tests of sinks share."""
