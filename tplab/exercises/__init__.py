"""The checks behind the labs' exercises, one file per lab."""
