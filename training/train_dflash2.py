r"""Train a DFlash 2 drafter, which guesses a block of tokens in one forward, on a frozen target.

    accelerate launch training/train_dflash2.py --config configs/drafters/dflash2.yaml \
        target=FOLDER output=DIR data.path=CHATS schedule.time_budget=12m
"""

from training.run import main

if __name__ == "__main__":
    main("dflash2", "drafters/dflash2.yaml", __doc__)
