"""What is wrong with a recipe, what a run will need and where its time goes."""
