"""What a method trains, sends and keeps, in words."""
