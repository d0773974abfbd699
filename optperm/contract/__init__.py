"""What every method is made with, and no user needs."""
