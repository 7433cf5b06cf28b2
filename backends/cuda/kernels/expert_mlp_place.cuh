// Where the records of experts lie.
#pragma once
#include "common.cuh"

// Passed by value. Slot s is record s % slots_per_chunk of chunk s / slots_per_chunk; `up` rows follow `gate` rows at the
// start of a record. Behind the n_slots slots of the pool lies the layer's bank, mapped: expert e is slot n_slots + e there.
struct ExpertPlace {
  u32 n_slots;
  u32 slots_per_chunk;
  u32 record_bytes;
  u32 up_bytes;
  u32 down_bytes;
};

// Where to find the expert of a route: its slot, its record in the bank where the op reads that in place, or -1 for nowhere.
__device__ __forceinline__ int slot_of(const ExpertMlpParams& p, const ExpertPlace& place, const int* table, int id) {
  if (id < 0) return -1;
  const int slot = table[id];
  return slot < 0 && p.in_place == 1 ? (int)place.n_slots + id : slot;
}

// The record of an expert that has a slot.
__device__ __forceinline__ const u8* record_of(const ExpertPlace& place, const u64* chunks, u32 slot) {
  return (const u8*)chunks[slot / place.slots_per_chunk] + (i64)(slot % place.slots_per_chunk) * place.record_bytes;
}
