"""What each possible observation would be worth."""
