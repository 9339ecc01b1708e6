"""What the machine offers: cores, devices and, over ranks, groups and collectives."""
