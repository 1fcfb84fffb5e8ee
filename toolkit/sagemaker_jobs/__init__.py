"""Recipes as SageMaker training jobs: checked, submitted, simulated on this machine, followed, fetched.

`job`: what is requested. `recipe_settings`: the recipe's flags. `limits`: what the service would refuse. `request`: what is
sent; `submit` sends it. `start` runs in the container, `contract` and `simulate` imitate one. `follow`: state and logs.
`fetch`: what a job made. boto3 and the SDK are imported only where they are used.
"""
