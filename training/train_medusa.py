r"""Train Medusa heads on a frozen target.

    accelerate launch training/train_medusa.py --config configs/drafters/medusa.yaml \
        target=FOLDER output=DIR data.path=CHATS schedule.time_budget=6m
"""

from training.run import main

if __name__ == "__main__":
    main("medusa", "drafters/medusa.yaml", __doc__)
