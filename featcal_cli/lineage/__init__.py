"""A merged repo → its base, its experts and their data."""
