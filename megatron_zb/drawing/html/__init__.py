"""A schedule or a plan as one HTML file that needs no network: pictures, tables and an explorer."""
