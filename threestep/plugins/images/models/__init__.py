"""Models of images and text: their parts, their processors, and what they compute of a few rows with images."""
