"""What is known of outcomes that are still to be seen, whatever found it."""
