"""Plain float64 references, a file each, written from the papers. They share no code with the trainers."""
