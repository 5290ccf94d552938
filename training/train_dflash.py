r"""Train a DFlash drafter, which guesses a block of tokens in one forward, on a frozen target.

    accelerate launch training/train_dflash.py --config configs/drafters/dflash.yaml \
        target=FOLDER output=DIR data.path=CHATS schedule.time_budget=12m
"""

from training.run import main

if __name__ == "__main__":
    main("dflash", "drafters/dflash.yaml", __doc__)
