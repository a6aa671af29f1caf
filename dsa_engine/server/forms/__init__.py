"""What requests ask for and how they are answered, in the form of each endpoint."""
