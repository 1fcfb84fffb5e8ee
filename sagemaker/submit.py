"""Run a recipe as a SageMaker training job, from a checkout: the same as `toolkit sagemaker submit`.

    python sagemaker/submit.py sft --instance-type ml.g5.12xlarge --instance-count 2 --spot --role ARN --max-steps 1000
"""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from toolkit.cli.main import main  # after the line above: the checkout's own

if __name__ == "__main__":
    sys.argv[1:1] = ["sagemaker", "submit"]
    main()
