r"""Train an EAGLE-3 drafter on a frozen target.

    accelerate launch training/train_eagle.py --config configs/drafters/eagle3.yaml \
        target=FOLDER output=DIR data.path=CHATS schedule.time_budget=12m
"""

from training.run import main

if __name__ == "__main__":
    main("eagle", "drafters/eagle3.yaml", __doc__)
