"""What a run will need and where its time goes."""
