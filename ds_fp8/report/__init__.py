"""Reports on finished runs: a verdict, figures as JSON, and one HTML file that needs no network."""
