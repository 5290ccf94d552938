r"""Train Medusa-2: heads and an adapter of their target together, from Medusa-1 heads.

    accelerate launch training/train_medusa2.py --config configs/drafters/medusa2.yaml \
        target=FOLDER output=DIR data.path=CHATS warm_start=MEDUSA schedule.time_budget=6m

What decides is then the target with the adapter: DIR/best/adapter.
"""

from training.run import main

if __name__ == "__main__":
    main("medusa", "drafters/medusa2.yaml", __doc__)
