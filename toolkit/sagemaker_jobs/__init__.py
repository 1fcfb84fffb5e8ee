"""Recipes as SageMaker training jobs: what is asked, checked and sent, what the container does with it, what comes back.

`job` is what a person asks for, `recipe_settings` what the recipe is told, `limits` what the service would refuse, `request`
what the SDK is given; `send` sends it. `start` runs in the container, `simulate` runs the same on this machine. `follow`
asks about a job, `fetch` brings home what it made. The SDK is imported in `send` alone.
"""
