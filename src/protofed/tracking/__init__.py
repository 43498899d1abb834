"""The numbers of a run, sent to trackers that people already use."""

TRACK = "PROTOFED_TRACK"  # the environment's word for --track
