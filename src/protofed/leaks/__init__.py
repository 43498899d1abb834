"""What leaks: what an honest-but-curious server gets from the uploads of a run (`protofed attack`).

Attackers among the members, who send wrong uploads, are another matter: `robust/`.
"""
