"""What Flower runs of protofed on either side."""
