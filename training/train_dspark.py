r"""Train a DSpark drafter, which guesses a block of tokens in one forward, on a frozen target.

    accelerate launch training/train_dspark.py --config configs/drafters/dspark.yaml \
        target=FOLDER output=DIR data.path=CHATS schedule.time_budget=12m
"""

from training.run import main

if __name__ == "__main__":
    main("dspark", "drafters/dspark.yaml", __doc__)
