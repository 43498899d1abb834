"""The papers: their tables and figures, and their convergence theorems."""
