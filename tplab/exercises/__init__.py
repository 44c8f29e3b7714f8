"""The checks behind the labs' exercises, one file a lab."""
