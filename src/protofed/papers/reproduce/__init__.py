"""The papers' tables and figures by name: what they report, what is measured here, and the difference."""
