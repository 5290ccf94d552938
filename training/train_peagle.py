r"""Train a P-EAGLE drafter, which guesses all depths in one forward, on a frozen target.

    accelerate launch training/train_peagle.py --config configs/drafters/peagle.yaml \
        target=FOLDER output=DIR data.path=CHATS schedule.time_budget=12m
"""

from training.run import main

if __name__ == "__main__":
    main("peagle", "drafters/peagle.yaml", __doc__)
